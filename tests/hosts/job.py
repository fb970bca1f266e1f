"""A script for the tests, as `paceline compare --live` trains: job.py WORKLOAD OPTIMIZER BATCH ITERATIONS

BATCH may be one number for each worker: 40,24,7.
"""

import sys

from paceline import workloads
from paceline.api import check_optimizer
from paceline.core.messages import Members
from paceline.workload_training import train

name, optimizer, batch, iterations = sys.argv[1:5]
workload = workloads.load(name)
sizes = tuple(map(int, batch.split(",")))
samples = sizes if len(sizes) > 1 else sizes[0]
train(workload, check_optimizer(optimizer, workload, samples, Members(1, 1)), samples, int(iterations), 0)
