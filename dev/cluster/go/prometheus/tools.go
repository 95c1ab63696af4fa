//go:build tools

// Package prometheus only pins what dev/cluster/build-binaries builds from other modules.
package prometheus

import (
	_ "github.com/prometheus/alertmanager/cmd/alertmanager"
	_ "github.com/prometheus/prometheus/cmd/prometheus"
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
