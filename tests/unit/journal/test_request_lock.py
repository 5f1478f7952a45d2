"""The lock of a journal: who gets it next."""

from concurrent.futures import ThreadPoolExecutor

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.journal.journal import _RequestLock


def test_a_thread_that_has_waited_gets_the_lock_before_the_one_that_releases_it():
    lock, order = _RequestLock(), []

    def wait():
        with lock:
            order.append("waited")

    def is_waiting():
        free = lock._turnstile.acquire(blocking=False)
        if free:
            lock._turnstile.release()
        return not free

    with ThreadPoolExecutor() as pool:
        with lock:
            waiter = pool.submit(wait)
            wait_until(is_waiting)
        with lock:
            order.append("again")
        waiter.result(WAIT_S)
    assert order == ["waited", "again"]
