"""Figures in the repository's Markdown: written from committed artifacts and stored measurements, never by hand."""
