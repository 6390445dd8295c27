"""Plans: what a job costs on a slice, which strategy is best, and why."""

from rooftop.plan.assumptions import Assumptions
from rooftop.plan.problem import Problem
from rooftop.plan.search import sweep
from rooftop.plan.train import TrainingAnswer, TrainingPlan, plan_training
from rooftop.plan.workload import Numerics, Workload

__all__ = [
    "Assumptions",
    "Numerics",
    "Problem",
    "TrainingAnswer",
    "TrainingPlan",
    "Workload",
    "plan_training",
    "sweep",
]
