"""What dljob adds to the interpreters of scripts: nested launchers, the end of gloo's threads, the observer."""
