"""What goes wrong. Every seed draws which kinds it has, so that rare combinations meet undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from ficc import failpoints
from simulation.controllers import Controller
from simulation.machine import Machine

if TYPE_CHECKING:
    from simulation.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance
        everything: list[Callable[[], None]] = [
            self.part, self.part, self.break_connections, self.slow_down, self.disturb,
            self.kill_executor, self.kill_executor_and_watchdog, self.kill_watchdog, self.stop_executor,
            self.stop_watchdog, self.end_executor_in_order, self.reboot,
            self.kill_controller, self.end_controller_in_order, self.stop_controller, self.jump_wall_clock,
            self.reboot_controllers_host, self.fill_disk, self.take_database_away, self.make_database_flaky,
            self.arm, self.arm, self.arm, self.kill_engine, self.stick_engine,
        ]  # fmt: skip
        count = 0 if world.calm else self.chance.choice((1, 2, 3, 5, len(everything)))
        self.kinds = self.chance.sample(everything, count)
        self.counts: dict[str, int] = {}

    def strike(self) -> None:
        kind = self.chance.choice(self.kinds)
        self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
        kind()

    # Drawing.

    def machine(self) -> Machine:
        return self.chance.choice(list(self.world.machines.values()))

    def controller(self) -> Controller:
        return self.chance.choice(self.world.controllers)

    def while_(self, begin: Callable[[], None], end: Callable[[], None], what: str, *seconds: float) -> None:
        length = self.chance.choice(seconds or (0.5, 5.0, 15.0, 40.0)) * self.chance.uniform(0.5, 1.5)
        self.world.trace(f"{what} for {length:.1f} s")
        begin()
        self.world.until_calm(length, end)

    # Between controllers and machines.

    def part(self) -> None:
        controller, machine = self.controller(), self.machine()
        link = self.world.network.link(controller.name, machine.name)
        if link.parted:
            return

        def begin() -> None:
            link.parted = True

        def end() -> None:
            if self.chance.random() < 0.5:
                self.world.network.break_off(link)
            self.world.network.meet(link)

        self.while_(begin, end, f"{controller.name} and {machine.name} are parted")

    def break_connections(self) -> None:
        controller, machine = self.controller(), self.machine()
        self.world.trace(f"the connections of {controller.name} and {machine.name} break")
        self.world.network.break_off(self.world.network.link(controller.name, machine.name))

    def slow_down(self) -> None:
        controller, machine = self.controller(), self.machine()
        link = self.world.network.link(controller.name, machine.name)
        seconds = self.chance.choice((0.1, 1.0, 6.0))

        def begin() -> None:
            link.slow_seconds = seconds

        def end() -> None:
            link.slow_seconds = 0.0

        self.while_(begin, end, f"{controller.name} and {machine.name} are {seconds} s apart")

    def disturb(self) -> None:
        controller, machine = self.controller(), self.machine()
        link = self.world.network.link(controller.name, machine.name)

        def begin() -> None:
            link.disturbed = True

        def end() -> None:
            link.disturbed = False

        self.while_(begin, end, f"frames of {controller.name} and {machine.name} overtake each other")

    # Executors and machines.

    def kill_executor(self) -> None:
        machine = self.machine()
        if machine.executor is not None:
            machine.executor.kill()

    def kill_watchdog(self) -> None:
        machine = self.machine()
        if machine.watchdog is not None:
            machine.watchdog.process.kill()

    def kill_executor_and_watchdog(self) -> None:
        machine = self.machine()
        if machine.watchdog is not None and machine.executor is not None:
            machine.watchdog.process.kill()
            machine.executor.kill()

    def stop_executor(self) -> None:
        process = self.machine().executor
        if process is not None and not process.dead and not process.stopped:
            self.while_(process.stop, process.go_on, f"{process.name} is stopped")

    def stop_watchdog(self) -> None:
        guard = self.machine().watchdog
        if guard is not None and not guard.process.dead and not guard.process.stopped:
            self.while_(guard.process.stop, guard.process.go_on, f"{guard.process.name} is stopped")

    def end_executor_in_order(self) -> None:
        process = self.machine().executor
        if process is not None and not process.dead and hasattr(process, "end"):
            self.world.trace(f"{process.name} is asked to end")
            process.later(0, process.end)

    def reboot(self) -> None:
        self.machine().power_off()

    def fill_disk(self) -> None:
        machine = self.machine()

        def begin() -> None:
            machine.disk_full = True

        def end() -> None:
            machine.disk_full = False

        self.while_(begin, end, f"the disk of {machine.name} is full")

    # Controllers.

    def kill_controller(self) -> None:
        process = self.controller().process
        if process is not None:
            process.kill()

    def end_controller_in_order(self) -> None:
        self.world.spawn(self.controller().end_in_order())

    def stop_controller(self) -> None:
        controller = self.controller()
        process = controller.process
        if process is not None and not process.dead and not process.stopped:
            self.world.note_stopped(controller)
            self.while_(process.stop, process.go_on, f"{process.name} is stopped")

    def jump_wall_clock(self) -> None:
        controller = self.controller()
        controller.ahead += self.chance.choice((-3600.0, -30.0, 30.0, 3600.0))
        self.world.trace(f"the wall clock of {controller.name} is {controller.ahead:+.0f} s off")

    def reboot_controllers_host(self) -> None:
        host = self.controller().host
        for controller in self.world.controllers:
            if controller.host is host and controller.process is not None:
                controller.process.kill()
        host.boot()
        self.world.trace(f"{host.name} reboots")

    def take_database_away(self) -> None:
        def begin() -> None:
            self.world.database_away = True

        def end() -> None:
            self.world.database_away = False

        self.while_(begin, end, "the database is away")

    def make_database_flaky(self) -> None:
        def begin() -> None:
            self.world.database_flaky = True

        def end() -> None:
            self.world.database_flaky = False

        self.while_(begin, end, "answers of the database get lost")

    # Processes of every kind.

    def arm(self) -> None:
        """Let a process die at a failpoint."""
        name = self.chance.choice(failpoints.NAMES)
        executors = [one.executor for one in self.world.machines.values()]
        controllers = [one.process for one in self.world.controllers]
        found = [p for p in (executors if name.startswith("executor") else controllers) if p and not p.dead]
        if found:
            process = self.chance.choice(found)
            process.armed = (name, self.chance.choice((1, 1, 1, 2, 5)))
            self.world.trace(f"{process.name} is to die at {name}, pass {process.armed[1]}")

    def kill_engine(self) -> None:
        if self.world.invariants.alive:
            engine = self.chance.choice(self.world.invariants.alive)
            self.world.trace(f"somebody kills the engine of {engine.group.name[-6:]}")
            self.world.invariants.exited_by_itself(engine)
            engine.die(signal.SIGKILL, "")

    def stick_engine(self) -> None:
        if self.world.invariants.alive:
            engine = self.chance.choice(self.world.invariants.alive)
            engine.stuck_until = self.world.loop.now + self.chance.uniform(1, 20)
            self.world.trace(f"the engine of {engine.group.name[-6:]} cannot be killed for a while")
