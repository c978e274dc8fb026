"""Reports: tables, plots, and published figures to compare with."""
