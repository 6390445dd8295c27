"""The local page: explorers with sliders over the functions that the command line calls. No formula lives here."""
