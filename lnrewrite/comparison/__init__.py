"""How far two models are apart: what judges an exact rewrite, and measures a calibrated one."""
