"""dljob: the operator. Import nothing here: the trainer image imports ``dljob.contract`` alone."""
