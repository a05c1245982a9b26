"""Read tables, arrays and folders of images, and say what is wrong with a file that cannot be read."""
