"""Claims, StorageClasses and PersistentVolumes in the cache."""

from dljob.kube.objects.storage.cached import CachedStorage
from dljob.kube.objects.storage.trim import claim, storage_class, volume

__all__ = ["CachedStorage", "claim", "storage_class", "volume"]
