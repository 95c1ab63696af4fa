"""A one-node Kubernetes cluster made of ordinary processes in private namespaces; standard library only."""
