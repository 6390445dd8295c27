"""The functions behind the commands: strings or objects in, results out. ``rooftop`` names all of them."""
