"""Alertmanager's webhook and the ledger of what it caused."""
