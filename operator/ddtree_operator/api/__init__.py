"""The DDTreeDeployment resource: models, CRD, and the names that every part shares."""
