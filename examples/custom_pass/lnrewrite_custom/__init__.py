"""Hold the passes of this package; lnrewrite finds them through entry points and imports one when it is asked for."""
