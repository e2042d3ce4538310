"""Memory of other libraries, by address: NumPy arrays over host memory, and DLPack import and export."""
