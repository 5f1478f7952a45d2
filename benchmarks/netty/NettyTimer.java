import io.netty.util.HashedWheelTimer;
import io.netty.util.Timeout;
import io.netty.util.TimerTask;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.util.concurrent.TimeUnit;

/**
 * What Netty's HashedWheelTimer (defaults: tick 100 ms, 512 slots) costs its caller and its worker.
 *
 * <p>A start and a cancel only put the timeout into a queue; the worker links and unlinks it at its
 * next ticks. So each round measures the caller's time (wall and CPU), then waits until the worker
 * has caught up, and measures the worker's CPU time as well.
 *
 * <p>Arguments: rounds, calls a round, then the numbers of pending timeouts.
 * Prints a line a round: pending, operation, and in nanoseconds a call the caller's wall time,
 * the caller's CPU time, and the worker's CPU time.
 */
public final class NettyTimer {
    private static final long DELAY_NS = TimeUnit.SECONDS.toNanos(120);
    private static final long TICK_MS = 100;
    private static final long LINKED_A_TICK = 100_000; // the worker's own limit
    private static final int WARM_UP = 10; // rounds
    private static final TimerTask TASK = timeout -> { };
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private final long pending;
    private final int calls;
    private final Timeout[] handles;
    private Thread worker;
    private final HashedWheelTimer timer = new HashedWheelTimer(this::makeWorker);

    private NettyTimer(long pending, int calls) {
        this.pending = pending;
        this.calls = calls;
        this.handles = new Timeout[calls];
    }

    public static void main(String[] args) throws InterruptedException {
        int rounds = Integer.parseInt(args[0]);
        int calls = Integer.parseInt(args[1]);
        for (int i = 2; i < args.length; i++) {
            NettyTimer bench = new NettyTimer(Long.parseLong(args[i]), calls);
            bench.fill();
            bench.warmUp();
            for (int round = 0; round < rounds; round++) {
                bench.measure("pair", bench::pairs);
                bench.measure("start", bench::starts);
                bench.measure("cancel", bench::cancels);
            }
            bench.timer.stop();
        }
    }

    /** Until all is compiled, the worker's code too. */
    private void warmUp() throws InterruptedException {
        for (int round = 0; round < WARM_UP; round++) {
            pairs();
            starts();
            cancels();
        }
        waitForWorker(2L * WARM_UP * calls);
    }

    /** Deadlines from half to one and a half times that of the calls measured; none comes due. */
    private void fill() throws InterruptedException {
        for (long i = 0; i < pending; i++) {
            timer.newTimeout(TASK, DELAY_NS / 2 + DELAY_NS / pending * i, TimeUnit.NANOSECONDS);
        }
        waitForWorker(pending);
    }

    private void measure(String operation, Runnable work) throws InterruptedException {
        long workerBefore = THREADS.getThreadCpuTime(worker.getId());
        long callerBefore = THREADS.getCurrentThreadCpuTime();
        long wallBefore = System.nanoTime();
        work.run();
        long wallNs = System.nanoTime() - wallBefore;
        long callerNs = THREADS.getCurrentThreadCpuTime() - callerBefore;
        waitForWorker(calls);
        long workerNs = THREADS.getThreadCpuTime(worker.getId()) - workerBefore;
        StringBuilder line = new StringBuilder().append(pending).append(' ').append(operation);
        for (long taken : new long[] {wallNs, callerNs, workerNs}) {
            line.append(' ').append((double) taken / calls);
        }
        System.out.println(line);
    }

    private void pairs() {
        for (int i = 0; i < calls; i++) {
            timer.newTimeout(TASK, DELAY_NS, TimeUnit.NANOSECONDS).cancel();
        }
    }

    private void starts() {
        for (int i = 0; i < calls; i++) {
            handles[i] = timer.newTimeout(TASK, DELAY_NS, TimeUnit.NANOSECONDS);
        }
    }

    private void cancels() {
        for (int i = 0; i < calls; i++) {
            handles[i].cancel();
            handles[i] = null;
        }
    }

    private void waitForWorker(long newcomers) throws InterruptedException {
        Thread.sleep((newcomers / LINKED_A_TICK + 3) * TICK_MS);
    }

    private Thread makeWorker(Runnable work) {
        worker = new Thread(work, "netty-timer");
        worker.setDaemon(true);
        return worker;
    }
}
