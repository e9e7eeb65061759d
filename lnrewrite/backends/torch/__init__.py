"""Captured torch graphs: captured, lifted, edited, run in float64."""
