"""Predictions of live runs from one that was measured: calibration, validation, advice, and what if.

measurements   what a run's times and trace say of each worker, the servers and the exchange
calibration    a scenario from them, with what could not be measured found by trying: the run, done again in virtual
               time, takes as long as it took
scenario_file  the scenario as a file
prediction     how long a policy takes under a scenario, in virtual time, without gradients
validation     live runs beside predicted ones
advisor        policies ranked by prediction
changes        what if there were other workers, servers or links
drawing        a picture of that
"""
