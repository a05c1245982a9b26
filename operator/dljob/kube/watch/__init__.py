"""Watch the API server: lists and streams of objects, with bounds on what one object may cost the operator."""

from dljob.kube.watch.activity import WatchActivity
from dljob.kube.watch.bounded_response import bounded_responses
from dljob.kube.watch.reflector import Reflector

__all__ = ["Reflector", "WatchActivity", "bounded_responses"]
