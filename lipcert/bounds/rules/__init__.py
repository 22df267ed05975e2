"""The rules, by kind of operation. Importing a module here fills the table."""

from lipcert.bounds.rules import activation, arithmetic, attention, linear, normalization, pooling, structure, surgery

__all__ = ["activation", "arithmetic", "attention", "linear", "normalization", "pooling", "structure", "surgery"]
