"""The only importers of DeepSpeed."""

from __future__ import annotations
