def copy_and_look(target: int, source: int, count: int, around: bool) -> bool: ...
def step(values: int, gradients: tuple[int, ...], targets: tuple[int, ...], rate: float, count: int) -> None: ...
def step_on_each(values: int, gradients: tuple[int, ...], rates: tuple[float, ...], count: int) -> None: ...
def optimize(
    kind: int,
    values: int,
    states: tuple[int, ...],
    average: int,
    gradients: tuple[int, ...],
    targets: tuple[int, ...],
    coefficients: tuple[float, ...],
    each: bool,
    count: int,
) -> None: ...
