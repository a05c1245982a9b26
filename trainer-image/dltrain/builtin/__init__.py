"""The built-in trainer, a script on the public API like any user's."""
