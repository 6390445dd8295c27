"""The local page: explorers with sliders over the same functions that the command line calls. No formula is here."""
