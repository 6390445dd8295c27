from rooftop.library.arrays import matmul as matmul
from rooftop.library.benchmarks import bench_collectives as bench_collectives
from rooftop.library.benchmarks import bench_serving as bench_serving
from rooftop.library.calibrating import calibrate as calibrate
from rooftop.library.catalogue import chip as chip
from rooftop.library.catalogue import chips as chips
from rooftop.library.catalogue import model as model
from rooftop.library.catalogue import models as models
from rooftop.library.compiling import compile as compile
from rooftop.library.compiling import inspect as inspect
from rooftop.library.embedding import embedding_limits as embedding_limits
from rooftop.library.embedding import plan_embedding as plan_embedding
from rooftop.library.explaining import diff as diff
from rooftop.library.explaining import explain as explain
from rooftop.library.explaining import explain_operations as explain_operations
from rooftop.library.explaining import validate as validate
from rooftop.library.planning import plan_training as plan_training
from rooftop.library.serving import plan_serving as plan_serving
from rooftop.library.serving import serve as serve
from rooftop.library.serving import serving_front as serving_front
from rooftop.library.simulation import simulate as simulate
from rooftop.library.training import export_embedding as export_embedding
from rooftop.library.training import train as train
from rooftop.library.training import train_embedding as train_embedding
from rooftop.serve.request import ServeRequest as ServeRequest

__version__: str
