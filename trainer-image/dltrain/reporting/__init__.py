"""Progress reports of scripts that do not call ``dltrain.init``. This package needs the standard library only."""
