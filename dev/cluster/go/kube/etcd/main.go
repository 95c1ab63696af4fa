// Command etcd is the unchanged etcd server. kube-apiserver already depends on its packages, so that
// building it from the same module costs almost nothing.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
