"""The report page: one self-contained HTML file of all results, with the provenance of every number."""
