"""The commands of ``dljob``, a module each."""
