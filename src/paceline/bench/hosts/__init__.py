"""Several hosts on one machine, with lines between them that are as slow or as broken as is wanted."""
