//go:build tools

// Package gateway pins Contour, a controller of the Gateway API.
package gateway

import (
	_ "github.com/projectcontour/contour/cmd/contour"
)
