{{/* The operator's environment. operator/dljob/app/settings.py reads it; a test compares the two. */}}
{{- define "dljob.env" -}}
- name: DLJOB_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: DLJOB_LEASE_NAME
  value: {{ include "dljob.fullname" . }}
- name: DLJOB_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: DLJOB_WATCH_NAMESPACES
  value: {{ include "dljob.watchNamespaces" . | fromJsonArray | join "," | quote }}
- name: DLJOB_COUNT_ALL_PODS
  value: {{ .Values.operator.countAllPods | quote }}
- name: DLJOB_LEADER_ELECTION
  value: {{ .Values.leaderElection.enabled | quote }}
- name: DLJOB_TRAINER_IMAGE
  value: {{ include "dljob.image" (dict "image" .Values.trainer.image "default" .Chart.AppVersion) | quote }}
- name: DLJOB_TRAINER_PULL_POLICY
  value: {{ .Values.trainer.image.pullPolicy }}
- name: DLJOB_LOOK_IMAGE
  value: {{ ternary (include "dljob.image" (dict "image" .Values.image "default" .Chart.AppVersion)) "" .Values.tasks.enabled | quote }}
- name: DLJOB_LOOK_PULL_POLICY
  value: {{ .Values.image.pullPolicy }}
- name: DLJOB_CLUSTER_DOMAIN
  value: {{ .Values.operator.clusterDomain }}
- name: DLJOB_CONCURRENCY
  value: {{ .Values.operator.concurrency | quote }}
- name: DLJOB_PROGRESS_WRITES_PER_SECOND
  value: {{ .Values.operator.progressWritesPerSecond | quote }}
- name: DLJOB_METRICS_PORT
  value: {{ .Values.metrics.port | quote }}
- name: DLJOB_METRICS_SOURCES
  value: {{ .Values.metrics.allowedSources | toJson | quote }}
- name: DLJOB_OVERRIDES
  value: {{ .Values.overrides }}
- name: DLJOB_JOB_DEFAULTS
  value: {{ .Values.jobDefaults | default dict | toJson | quote }}
- name: DLJOB_GANG_SCHEDULING
  value: {{ .Values.gangScheduling }}
- name: DLJOB_PREEMPTION
  value: {{ .Values.preemption }}
- name: DLJOB_NODE_TEMPLATES
  value: {{ .Values.autoscaling.nodeTemplates | toJson | quote }}
- name: DLJOB_SCALE_UP_SECONDS
  value: {{ int .Values.autoscaling.startTimeoutSeconds | quote }}
{{- with .Values.autoscaling.provisioningRequests }}
- name: DLJOB_PROVISIONING_CLASS
  value: {{ ternary .className "" .enabled | quote }}
{{- end }}
- name: DLJOB_SHARE_PROFILES
  value: {{ .Values.profiles.shared | quote }}
- name: DLJOB_PROBES
  value: {{ ternary "true" "false" (eq (include "dljob.probes" .) "true") | quote }}
- name: DLJOB_PROBE_GPUS
  value: {{ .Values.probes.gpus | quote }}
- name: DLJOB_PROBE_LINKS
  value: {{ .Values.probes.links | quote }}
- name: DLJOB_PROBE_PRIORITY_CLASS
  value: {{ include "dljob.probePriorityClassName" . }}
- name: DLJOB_NODE_ARCHITECTURES
  value: {{ .Values.nodes.architectures | join "," | quote }}
- name: DLJOB_NODE_FAULTS
  value: {{ ternary (int .Values.nodeFaults.limit) 0 .Values.nodeFaults.enabled | quote }}
- name: DLJOB_NODE_FAULT_WINDOW_SECONDS
  value: {{ int .Values.nodeFaults.windowSeconds | quote }}
- name: DLJOB_NODE_LEFT_OUT_SECONDS
  value: {{ int .Values.nodeFaults.leftOutSeconds | quote }}
- name: DLJOB_NODE_LEFT_OUT_MAX_SECONDS
  value: {{ int .Values.nodeFaults.maxLeftOutSeconds | quote }}
- name: DLJOB_KUEUE
  value: {{ .Values.kueue.enabled | toString | quote }}
- name: DLJOB_QUEUE_DEADLINES
  value: {{ .Values.queue.deadlines | quote }}
- name: DLJOB_QUEUE_WEIGHTS
  value: {{ .Values.queue.weights | default dict | toJson | quote }}
- name: DLJOB_QUEUE_ASSIGNMENT
  value: {{ .Values.queue.assignment }}
- name: DLJOB_LOG_LEVEL
  value: {{ .Values.operator.logLevel }}
- name: DLJOB_LOG_FORMAT
  value: {{ .Values.operator.logFormat }}
{{- end -}}
