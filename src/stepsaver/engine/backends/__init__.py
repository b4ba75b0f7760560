"""What runs the operations of a layer, a folder per kind of device. `forward.py` knows none of them."""
