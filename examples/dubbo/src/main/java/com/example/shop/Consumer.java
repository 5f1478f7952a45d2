package com.example.shop;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.StringJoiner;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import org.apache.dubbo.common.stream.StreamObserver;
import org.apache.dubbo.config.ReferenceConfig;
import org.apache.dubbo.config.bootstrap.DubboBootstrap;
import org.apache.dubbo.rpc.RpcContext;
import org.apache.dubbo.rpc.RpcException;

/**
 * A consumer that makes a call for each line that it reads, and prints a line for each response.
 *
 * <pre>
 * place ITEM               watch COUNT
 * upload ITEM ITEM ...     chat ITEM ITEM ...
 * load SECONDS             calls without a pause; prints which servers answered, and each error
 * attach KEY=VALUE         an attachment of the next call
 * </pre>
 */
public final class Consumer {
    private static Orders orders;

    private Consumer() {}

    public static void main(String[] arguments) throws IOException {
        ReferenceConfig<Orders> reference = new ReferenceConfig<>();
        reference.setInterface(Orders.class);
        reference.setTimeout(Integer.parseInt(Settings.get("timeout", "3000")));
        reference.setCheck(false);
        Settings.serviceOf(reference);
        DubboBootstrap.getInstance()
                .application(Settings.application("java-consumer"))
                .registry(Settings.registry())
                .reference(reference)
                .start();
        orders = reference.get();
        System.out.println("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                call(words);
            } catch (RpcException | ExecutionException | IllegalStateException error) {
                System.out.println("! " + describe(error));
            } catch (InterruptedException interrupted) {
                return;
            }
        }
        System.exit(0);
    }

    private static void call(String[] words) throws ExecutionException, InterruptedException {
        switch (words[0]) {
            case "attach":
                String[] pair = words[1].split("=");
                RpcContext.getClientAttachment().setAttachment(pair[0], pair[1]);
                System.out.println("attached");
                break;
            case "place":
                Receipt receipt = orders.place(order(words[1]));
                Object by = RpcContext.getServerContext().getObjectAttachment("served-by");
                print(receipt, by);
                break;
            case "watch":
                Responses watched = new Responses();
                orders.watch(order(words[1]), watched);
                System.out.println(watched.await());
                break;
            case "upload":
            case "chat":
                Responses responses = new Responses();
                StreamObserver<Order> requests =
                        words[0].equals("chat") ? orders.chat(responses) : orders.upload(responses);
                for (int at = 1; at < words.length; at++) {
                    requests.onNext(order(words[at]));
                }
                requests.onCompleted();
                System.out.println(responses.await());
                break;
            case "load":
                load(Double.parseDouble(words[1]));
                break;
            default:
                System.out.println("! unknown: " + words[0]);
        }
    }

    private static void load(double seconds) {
        ConcurrentMap<String, AtomicInteger> counts = new ConcurrentHashMap<>();
        long end = System.nanoTime() + (long) (seconds * 1e9);
        while (System.nanoTime() < end) {
            String outcome;
            try {
                outcome = orders.place(order("load")).getServer();
            } catch (RpcException error) {
                outcome = "! " + describe(error);
            }
            counts.computeIfAbsent(outcome, key -> new AtomicInteger()).incrementAndGet();
        }
        System.out.println(counts);
    }

    private static Order order(String item) {
        return Order.newBuilder().setItem(item).build();
    }

    private static void print(Receipt receipt, Object servedBy) {
        String trailer = servedBy == null ? "" : " served-by=" + servedBy;
        System.out.println(receipt.getServer() + ": " + receipt.getText().replace('\n', ' ') + trailer);
    }

    private static String describe(Throwable error) {
        StringJoiner text = new StringJoiner(" <- ");
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            String code = cause instanceof RpcException ? " code " + ((RpcException) cause).getCode() : "";
            String message = String.valueOf(cause.getMessage());
            text.add(cause.getClass().getSimpleName() + code + " " + message.split("\n")[0]);
        }
        return text.toString();
    }

    /** The responses of a stream, joined. */
    private static final class Responses implements StreamObserver<Receipt> {
        private final StringBuilder text = new StringBuilder();
        private final CompletableFuture<String> ended = new CompletableFuture<>();

        @Override
        public void onNext(Receipt receipt) {
            text.append(receipt.getServer()).append(": ").append(receipt.getText()).append("; ");
        }

        @Override
        public void onError(Throwable error) {
            ended.completeExceptionally(error);
        }

        @Override
        public void onCompleted() {
            ended.complete(text.toString());
        }

        String await() throws ExecutionException, InterruptedException {
            return ended.get();
        }
    }
}
