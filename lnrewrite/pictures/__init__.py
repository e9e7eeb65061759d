"""Show streams and what a probe found as SVG and HTML: one file each, light and dark, no network, no script."""
