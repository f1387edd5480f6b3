"""Audit of a user's own prompt: does a field matter, where are its notes, which edit of it is safe and cheapest."""

from kvprobe.auditing.measure import audit
from kvprobe.auditing.result import AuditResult, Dependence, FieldAudit, Safety
from kvprobe.auditing.summary import summary

__all__ = ["AuditResult", "Dependence", "FieldAudit", "Safety", "audit", "summary"]
