"""`spindle fleet up`: the scheduler of a live fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, Objective, PolicyName, ReallocS, StoreFile

_OF_STORE = ("fake", "address", "fleet", "engine", "policy", "objective", "reallocation", "interval")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def up(
    context: typer.Context,
    store: StoreFile = STORE,
    fake: Annotated[
        str,
        typer.Option(
            "--fake",
            metavar="FLEET",
            help="Pretend to have these machines (a .toml file or a name), and run all processes on this one.",
            show_default=False,
        ),
    ] = "",
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="Join this Ray cluster.", show_default=False)
    ] = "",
    engine: Annotated[str, typer.Option("--engine", help="What starts the processes: ray or slurm.")] = "ray",
    fleet: Annotated[
        str,
        typer.Option(
            "--fleet",
            metavar="FLEET.toml",
            help="Describes teams, and kinds of devices that Spindle does not know.",
            show_default=False,
        ),
    ] = "",
    policy: PolicyName = "price",
    objective: Objective = "jct",
    reallocation: ReallocS = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", help="The shortest time between two rounds of scheduling.", min=0.1
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="How long a job may take to save a checkpoint.", min=0),
    ] = 30.0,
    view: Annotated[bool, typer.Option("--view", help="Serve the live report to browsers on this machine.")] = False,
) -> None:
    """Run the scheduler of a fleet. Then submit jobs with `spindle fleet submit`.

    Without --address, it starts Ray on loopback with the devices of this machine. Training does not depend on this
    process: if it ends (Ctrl-C), jobs keep running, and the next `up` adopts them. `spindle fleet down` ends the fleet.
    The options that describe the fleet are stored, so the next `up` does not need them. Examples:

    spindle fleet up

    spindle fleet up --fake fleet.toml --interval 5

    spindle fleet up --address 10.0.0.1:6379 --store team.db
    """
    import signal
    import time
    from contextlib import ExitStack, suppress

    from spindle.cli.terminal import notice
    from spindle.errors import InputError
    from spindle.fleet.live import LiveFleet
    from spindle.fleet.machines import create_fleet, open_engine
    from spindle.fleet.policies import policy_named
    from spindle.fleet.state import SchedulerOptions
    from spindle.fleet.store import Store, network_file_system

    def say(text: str) -> None:
        with suppress(OSError):  # a full disk must not end the scheduler
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    if store.exists():
        if given := [f"--{name}" for name in _OF_STORE if _is_given(context, name)]:
            raise InputError(
                f"{store}: this fleet exists, and its store remembers how it was made; leave {', '.join(given)} out, "
                "or give another --store"
            )
        opened = Store.open(store)
    else:
        policy_named(policy)
        options = SchedulerOptions(
            policy=policy,
            objective=objective,
            realloc_s=reallocation,
            min_interval_s=interval,
            max_interval_s=max(interval, min(300.0, 10 * interval)),
        )
        opened = create_fleet(store, options, engine=engine, fake=fake, address=address, fleet=fleet)
    with opened, ExitStack() as stack:
        opened.take_lock()
        if kind := network_file_system(store):
            notice(f"{store} is on a network file system ({kind}): it is written without a write-ahead log, slower")
        machines = open_engine(opened)
        live = LiveFleet(store=opened, engine=machines, grace_s=grace, notify=say)
        received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: received.append(number))
        if view:
            from spindle.report.live_view import serving

            say(f"view: {stack.enter_context(serving(opened))}")
        say(f"{opened.fleet.cluster.name}: {opened.fleet.cluster.num_devices} devices; store {store}")
        try:
            live.run(lambda: bool(received))
        finally:
            live.close()
            machines.close(end_machines=live.is_down)
        if live.is_down:
            say("the fleet is down; `spindle fleet up` resumes its jobs")
        else:
            say("the scheduler has ended; training continues (`spindle fleet up`, `spindle fleet down`)")
