{{/*
Fail for values that the operator would reject at its start, if they depend on each other. values.schema.json checks the others.
The operator checks all of them again, for those who set its environment without this chart.
*/}}
{{- define "dljob.validate" -}}
{{- /* Values that releases after 0.2.0 have added; with --reuse-values, Helm leaves them without a default. */}}
{{- range $path := list "autoscaling" "gangScheduling" "kueue" "nodeFaults" "nodes" "operator.countAllPods" "operator.progressWritesPerSecond" "preemption" "priorityClass" "probes" "queue" "tasks" }}
{{- $section := $.Values }}
{{- if contains "." $path }}
{{- $section = index $.Values (splitList "." $path | first) }}
{{- end }}
{{- if not (hasKey $section (splitList "." $path | last)) }}
{{- fail (printf "%s: found no value; expected one, at least the default of this chart. Upgrade with --reset-then-reuse-values in place of --reuse-values, which keeps the defaults of the earlier chart, and remove null." $path) }}
{{- end }}
{{- end }}
{{- $defaults := .Values.jobDefaults | default dict }}
{{- $carbon := ($defaults.energy | default dict).carbon | default dict }}
{{- if and (hasKey $carbon "gramsPerKwh") (hasKey $carbon "gramsPerKwhByHour") }}
{{- fail "jobDefaults.energy.carbon: found gramsPerKwh and gramsPerKwhByHour; expected one of them. Remove the other." }}
{{- end }}
{{- range $i, $each := ($defaults.scheduling | default dict).tolerations }}
{{- if and (eq ($each.operator | default "Equal") "Exists") (hasKey $each "value") }}
{{- fail (printf "jobDefaults.scheduling.tolerations[%d].value: found a value with operator Exists, which matches all values; expected no value. Remove value, or choose operator Equal." $i) }}
{{- end }}
{{- if and (hasKey $each "tolerationSeconds") (ne ($each.effect | default "") "NoExecute") }}
{{- fail (printf "jobDefaults.scheduling.tolerations[%d].tolerationSeconds: found this field without effect NoExecute; expected both. Set effect to NoExecute, or remove tolerationSeconds." $i) }}
{{- end }}
{{- end }}
{{- $selector := include "dljob.selector" . | fromYaml }}
{{- range $name, $value := .Values.podLabels }}
{{- if hasKey $selector $name }}
{{- fail (printf "podLabels: found %s, by which the objects of this chart select the operator's pods; expected other labels. Remove it, or set nameOverride." $name) }}
{{- end }}
{{- end }}
{{- $names := list }}
{{- $nodes := 0 }}
{{- range $i, $each := .Values.autoscaling.nodeTemplates }}
{{- if has $each.name $names }}
{{- fail (printf "autoscaling.nodeTemplates[%d].name: found %q twice; expected unique names. Rename one." $i $each.name) }}
{{- end }}
{{- $names = append $names $each.name }}
{{- if and $each.devices (not $each.device) }}
{{- fail (printf "autoscaling.nodeTemplates[%d].devices: found %d without device; expected also the type of the devices. Set device, such as NVIDIA-L4." $i (int $each.devices)) }}
{{- end }}
{{- $nodes = add $nodes (int $each.count) }}
{{- end }}
{{- if gt (int $nodes) 2000 }}
{{- fail (printf "autoscaling.nodeTemplates: found %d nodes in all templates; expected at most 2000. Lower count in a template." (int $nodes)) }}
{{- end }}
{{- end -}}
