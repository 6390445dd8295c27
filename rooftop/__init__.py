"""rooftop: plan, compile, run and explain large-model training, serving and embedding on TPU and GPU meshes."""

__version__ = "0.1.0"
