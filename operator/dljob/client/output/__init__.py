"""Read the output of the ranks of a job: from its pods while it runs, and what is stored of one that has ended."""
