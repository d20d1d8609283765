"""Process groups and what runs over them; the only room that names them."""
