"""A script for the tests, as `paceline compare --live` trains: job.py WORKLOAD OPTIMIZER BATCH ITERATIONS"""

import sys

from paceline import workloads
from paceline.api import check_optimizer
from paceline.core.messages import Members
from paceline.workload_training import train

name, optimizer, batch, iterations = sys.argv[1:5]
workload = workloads.load(name)
train(workload, check_optimizer(optimizer, workload, int(batch), Members(1, 1)), int(batch), int(iterations), 0)
