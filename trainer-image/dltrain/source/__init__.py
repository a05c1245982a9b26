"""The files of ``spec.trainer.source``: fetch them from a ConfigMap, a git repository or an archive into the pod."""
