//go:build tools

// Package buildkit only pins what dev/cluster/build-binaries builds from other modules.
package buildkit

import (
	_ "github.com/moby/buildkit/cmd/buildctl"
	_ "github.com/moby/buildkit/cmd/buildkitd"
)
