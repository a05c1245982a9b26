{{- define "dljob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "dljob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "dljob.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/*
Name of the release's ClusterRoles, which belong to no namespace. Releases in several namespaces may have the same name, if
each manages jobs in some namespaces only.
*/}}
{{- define "dljob.clusterRoleName" -}}
{{- $name := include "dljob.fullname" . -}}
{{- ternary (printf "%s-%s" $name .Release.Namespace) $name (gt (len (include "dljob.watchNamespaces" . | fromJsonArray)) 0) -}}
{{- end -}}

{{- define "dljob.selector" -}}
app.kubernetes.io/name: {{ include "dljob.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "dljob.labels" -}}
{{ include "dljob.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "dljob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dljob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Image reference for (dict "image" VALUES "default" TAG). A digest takes precedence over a tag. */}}
{{- define "dljob.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .default .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Namespaces that the operator manages, as JSON; [] means all. */}}
{{- define "dljob.watchNamespaces" -}}
{{- if .Values.singleNamespaceInstall -}}
{{- list .Release.Namespace | toJson -}}
{{- else -}}
{{- .Values.watchNamespaces | toJson -}}
{{- end -}}
{{- end -}}

{{/*
The rules of one section of files/rbac.yaml that the values of .root need, without their reasons. RELEASE in a resource
name becomes the release's full name.
*/}}
{{- define "dljob.rules" -}}
{{- $root := .root }}
{{- range .rules }}
{{- $off := and .feature (not (index $root.Values .feature).enabled) }}
{{- if eq (.feature | default "") "probes" }}
{{- $off = not (include "dljob.probes" $root) }}
{{- end }}
{{- if not (or $off (eq (.unlessOverrides | default "") $root.Values.overrides)) }}
- apiGroups: {{ .apiGroups | toJson }}
  resources: {{ .resources | toJson }}
  {{- with .resourceNames }}
  resourceNames: {{ . | toJson | replace "RELEASE" (include "dljob.fullname" $root) }}
  {{- end }}
  verbs: {{ .verbs | toJson }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Not empty if the operator gets the permissions to use Kueue. */}}
{{- define "dljob.kueue" -}}
{{- $enabled := .Values.kueue.enabled | toString }}
{{- $served := or (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1") (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2") }}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") $served) }}true{{ end }}
{{- end -}}

{{/*
Not empty if the operator measures hardware by itself. It must see the pods of all namespaces, to measure idle nodes only.
*/}}
{{- define "dljob.probes" -}}
{{- if and .Values.probes.enabled (not .Values.singleNamespaceInstall) (or (not .Values.watchNamespaces) .Values.operator.countAllPods) }}true{{ end }}
{{- end -}}

{{/* The priority class of the pods that measure hardware: the one that the values name, or the chart's own. */}}
{{- define "dljob.probePriorityClassName" -}}
{{- .Values.probes.priorityClassName | default (printf "%s-probes" (printf "%s-%s" .Release.Namespace (include "dljob.fullname" .) | trunc 56 | trimAll "-")) }}
{{- end }}

{{/* The priority class of the operator's pod: the one that the values name, or the chart's own; empty for none. */}}
{{- define "dljob.priorityClassName" -}}
{{- .Values.priorityClassName | default (include "dljob.ownPriorityClassName" .) }}
{{- end }}

{{/* The name of the priority class that the chart creates; empty if it creates none. */}}
{{- define "dljob.ownPriorityClassName" -}}
{{- if and .Values.priorityClass.create (not .Values.priorityClassName) (not .Values.singleNamespaceInstall) }}{{ printf "%s-%s" .Release.Namespace (include "dljob.fullname" .) | trunc 63 | trimAll "-" }}
{{- end }}
{{- end }}
