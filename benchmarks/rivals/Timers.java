import io.netty.util.HashedWheelTimer;
import io.netty.util.Timeout;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.server.util.timer.SystemTimer;
import org.apache.kafka.server.util.timer.SystemTimerReaper;
import org.apache.kafka.server.util.timer.TimerTask;

/**
 * Measures Netty's HashedWheelTimer, Kafka's SystemTimer or the JDK's ScheduledThreadPoolExecutor.
 *
 * <p>The argument is the name of the timer: a virtual machine measures only one. The protocol and
 * the measurements are those of benchmarks/timer/peers.py. All delays are in milliseconds.
 */
public final class Timers {
    private static final BufferedReader IN = new BufferedReader(new InputStreamReader(System.in));
    private static final Random RANDOM = new Random(1);
    private static final long CONSTANT = 60_000;
    private static final long[] DELAYS = delays(100_000, 30_000, 90_000);

    public static void main(String[] args) throws Exception {
        for (String line = IN.readLine(); line != null; line = IN.readLine()) {
            String[] words = line.split(" ");
            int pending = Integer.parseInt(words[1]);
            int calls = Integer.parseInt(words[2]);
            Rival timer = make(args[0]);
            switch (words[0]) {
                case "calls" -> calls(timer, pending, calls);
                case "backlog" -> backlog(timer, calls);
                case "ontime" -> onTime(timer, calls);
                case "pending" -> pending(timer, pending, calls);
                case "lateness" -> lateness(timer, calls);
                default -> throw new IllegalArgumentException(line);
            }
            System.out.println("ok");
            timer.close();
        }
    }

    private static Rival make(String name) {
        return switch (name) {
            case "netty-512" -> new Netty(512);
            case "netty-65536" -> new Netty(65_536);
            case "kafka" -> new Kafka();
            case "jdk" -> new Jdk();
            default -> throw new IllegalArgumentException(name);
        };
    }

    private static void calls(Rival timer, int pending, int calls) throws Exception {
        timer.release();
        fill(timer, pending);
        System.gc();
        for (int i = 0; i < calls / 4; i++) {
            timer.cancel(timer.start(CONSTANT));
        }
        timer.settle();
        pause("begin");
        for (int i = 0; i < calls; i++) {
            timer.cancel(timer.start(CONSTANT));
        }
        timer.settle();
        pause("end pair " + calls);
        pause("begin");
        for (int i = 0; i < calls; i++) {
            timer.cancel(timer.start(DELAYS[i % DELAYS.length]));
        }
        timer.settle();
        pause("end varied " + calls);
        Object[] handles = new Object[calls];
        pause("begin");
        for (int i = 0; i < calls; i++) {
            handles[i] = timer.start(DELAYS[i % DELAYS.length]);
        }
        timer.settle();
        pause("end start " + calls);
        pause("begin");
        for (Object handle : handles) {
            timer.cancel(handle);
        }
        timer.settle();
        pause("end cancel " + calls);
    }

    private static void backlog(Rival timer, int calls) throws Exception {
        long[] delays = delays(calls, 1, 1_000);
        CountDownLatch done = new CountDownLatch(1);
        timer.hold();
        for (long delay : delays) {
            timer.start(delay);
        }
        timer.run(1_050, done::countDown);
        System.gc();
        Thread.sleep(1_300);
        pause("begin");
        timer.release();
        done.await();
        pause("end backlog " + calls);
    }

    private static void onTime(Rival timer, int calls) throws Exception {
        int last = 1_000 + calls / 100;
        long[] delays = delays(calls, 1_000, last);
        CountDownLatch done = new CountDownLatch(1);
        timer.release();
        for (long delay : delays) {
            timer.start(delay);
        }
        timer.run(last + 10, done::countDown);
        timer.settle();
        pause("begin");
        done.await();
        pause("end ontime " + calls);
    }

    private static void pending(Rival timer, int count, int milliseconds) throws Exception {
        pause("begin");
        Thread.sleep(milliseconds);
        pause("end empty 1");
        timer.release();
        fill(timer, 1);
        long before = usedBytes();
        fill(timer, count);
        System.out.println("value bytes " + (double) (usedBytes() - before) / count);
        Thread.sleep(1_000);
        pause("begin");
        Thread.sleep(milliseconds);
        pause("end idle 1");
    }

    private static void lateness(Rival timer, int calls) throws Exception {
        double[] late = new double[calls];
        CountDownLatch done = new CountDownLatch(calls);
        timer.release();
        long[] delays = delays(calls, 1, 100);
        for (int i = 0; i < calls; i++) {
            int index = i;
            long due = System.nanoTime() + delays[i] * 1_000_000;
            timer.run(delays[i], () -> {
                late[index] = (System.nanoTime() - due) / 1e3;
                done.countDown();
            });
        }
        done.await();
        Arrays.sort(late);
        System.out.println("value p50_us " + late[calls / 2]);
        System.out.println("value p99_us " + late[calls * 99 / 100]);
        System.out.println("value least_us " + late[0]);
    }

    private static void fill(Rival timer, int pending) throws Exception {
        for (int i = 0; i < pending; i++) {
            timer.start(DELAYS[i % DELAYS.length]);
        }
        timer.settle();
    }

    private static long usedBytes() {
        for (int i = 0; i < 3; i++) {
            System.gc();
        }
        return Runtime.getRuntime().totalMemory() - Runtime.getRuntime().freeMemory();
    }

    private static void pause(String text) throws IOException {
        System.out.println(text);
        IN.readLine();
    }

    private static long[] delays(int count, int low, int high) {
        return RANDOM.longs(count, low, high + 1).toArray();
    }

    private abstract static class Rival {
        private final CountDownLatch gate = new CountDownLatch(1);

        /** Starts a timeout whose task does nothing; returns the argument of {@link #cancel}. */
        abstract Object start(long delay);

        abstract void cancel(Object handle);

        abstract void run(long delay, Runnable task);

        abstract void close() throws Exception;

        /** Waits until the timer's thread has processed all earlier starts and cancels. */
        void settle() throws InterruptedException { }

        /** Keeps the timer's thread busy until {@link #release}. */
        void hold() throws InterruptedException {
            CountDownLatch held = new CountDownLatch(1);
            run(1, () -> {
                held.countDown();
                try {
                    gate.await();
                } catch (InterruptedException error) {
                    throw new IllegalStateException(error);
                }
            });
            held.await();
        }

        void release() {
            gate.countDown();
        }
    }

    private static final class Netty extends Rival {
        private static final io.netty.util.TimerTask TASK = timeout -> { };
        private final HashedWheelTimer timer;

        Netty(int slots) {
            timer = new HashedWheelTimer(1, TimeUnit.MILLISECONDS, slots);
        }

        @Override Object start(long delay) {
            return timer.newTimeout(TASK, delay, TimeUnit.MILLISECONDS);
        }

        @Override void cancel(Object handle) {
            ((Timeout) handle).cancel();
        }

        @Override void run(long delay, Runnable task) {
            timer.newTimeout(timeout -> task.run(), delay, TimeUnit.MILLISECONDS);
        }

        /** The worker takes starts from a queue, in order, and at the end of a tick the cancels. */
        @Override void settle() throws InterruptedException {
            for (int i = 0; i < 2; i++) {
                CountDownLatch done = new CountDownLatch(1);
                run(1, done::countDown);
                done.await();
            }
        }

        @Override void close() {
            timer.stop();
        }
    }

    private static final class Kafka extends Rival {
        private final SystemTimer timer = new SystemTimer("timer");
        private SystemTimerReaper reaper;

        private static final class Task extends TimerTask {
            Task(long delay) {
                super(delay);
            }

            @Override public void run() { }
        }

        @Override Object start(long delay) {
            Task task = new Task(delay);
            timer.add(task);
            return task;
        }

        @Override void cancel(Object handle) {
            ((Task) handle).cancel();
        }

        @Override void run(long delay, Runnable task) {
            timer.add(new TimerTask(delay) {
                @Override public void run() {
                    task.run();
                }
            });
        }

        /** Its tasks run on another thread than its wheel, so a task cannot hold the wheel. */
        @Override void hold() { }

        @Override void release() {
            reaper = new SystemTimerReaper("reaper", timer);
        }

        @Override void close() throws Exception {
            reaper.close();
        }
    }

    private static final class Jdk extends Rival {
        private static final Runnable TASK = () -> { };
        private final ScheduledThreadPoolExecutor timer = new ScheduledThreadPoolExecutor(1);

        Jdk() {
            timer.setRemoveOnCancelPolicy(true);
        }

        @Override Object start(long delay) {
            return timer.schedule(TASK, delay, TimeUnit.MILLISECONDS);
        }

        @Override void cancel(Object handle) {
            ((ScheduledFuture<?>) handle).cancel(false);
        }

        @Override void run(long delay, Runnable task) {
            timer.schedule(task, delay, TimeUnit.MILLISECONDS);
        }

        @Override void close() {
            timer.shutdownNow();
        }
    }
}
