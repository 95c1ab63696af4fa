//go:build tools

// Package kwok only pins what dev/cluster/build-binaries builds from other modules.
package kwok

import (
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
