{{- define "ddtree.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "ddtree.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "ddtree.name" .) .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else if hasPrefix .Release.Name (include "ddtree.name" .) }}{{ include "ddtree.name" . }}
{{- else }}{{ printf "%s-%s" .Release.Name (include "ddtree.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ddtree.selector" -}}
app.kubernetes.io/name: {{ include "ddtree.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ddtree.labels" -}}
{{ include "ddtree.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ddtree-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "ddtree.builderLabels" -}}
app.kubernetes.io/name: buildkitd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ddtree.serviceAccount" -}}
{{ default (include "ddtree.fullname" .) .Values.serviceAccount.name }}
{{- end }}

{{/* Namespaces to watch, as a JSON list under the key "list" (templates can only hand text around). */}}
{{- define "ddtree.namespaces" -}}
{{ dict "list" (default (list .Release.Namespace) .Values.watchNamespaces) | toJson }}
{{- end }}

{{/* What the schema cannot say in words. */}}
{{- define "ddtree.check" -}}
{{- range $key, $image := dict "image" .Values.image "builder.image" .Values.builder.image "build.baseImage" .Values.build.baseImage "build.builderImage" .Values.build.builderImage "build.buildahImage" .Values.build.buildahImage }}
{{- if and $image (not (regexMatch "^[^@\\s]+@sha256:[0-9a-f]{64}$" $image)) }}
{{- fail (printf "%s is %q: give an image by digest, repository@sha256:<64 hex digits>, because a tag can change" $key $image) }}
{{- end }}
{{- end }}
{{- if not .Values.image }}
{{- fail "image is missing: set image to the operator's image by digest, repository@sha256:<64 hex digits>" }}
{{- end }}
{{- if and .Values.builder.enabled (not .Values.builder.image) }}
{{- fail "builder.image is missing: set it to an image with buildkitd, buildctl and runc by digest, or set builder.enabled=false" }}
{{- end }}
{{- if and .Values.builder.enabled .Values.builder.address }}
{{- fail "builder.address is for a buildkitd elsewhere: set builder.enabled=false, or leave the address out" }}
{{- end }}
{{- if and .Values.builder.enabled (has .Values.builder.namespace (include "ddtree.namespaces" . | fromJson).list) }}
{{- fail "builder.namespace is one of the watched namespaces: give the privileged builder a namespace of its own" }}
{{- end }}
{{- end }}
