package com.example.shop;

import java.util.Map;
import java.util.TreeMap;
import org.apache.dubbo.common.stream.StreamObserver;
import org.apache.dubbo.config.ProtocolConfig;
import org.apache.dubbo.config.ServiceConfig;
import org.apache.dubbo.config.bootstrap.DubboBootstrap;
import org.apache.dubbo.rpc.RpcContext;
import org.apache.dubbo.rpc.TriRpcStatus;

/** A provider: {@code java -Dport=50051 -cp target/dubbo-example.jar com.example.shop.Provider}. */
public final class Provider {
    private Provider() {}

    public static void main(String[] arguments) {
        int port = Integer.parseInt(Settings.get("port", "50051"));
        ServiceConfig<Orders> service = new ServiceConfig<>();
        service.setInterface(Orders.class);
        service.setRef(new OrdersOf(Settings.get("server", "java-" + port)));
        Settings.serviceOf(service);
        String tag = Settings.get("tag", "");
        if (!tag.isEmpty()) {
            service.setTag(tag);
        }
        DubboBootstrap.getInstance()
                .application(Settings.application("java-shop"))
                .registry(Settings.registry())
                .protocol(new ProtocolConfig("tri", port))
                .service(service)
                .start();
        System.out.println("serving at port " + port);
        DubboBootstrap.getInstance().await();
    }

    /** The service. */
    private static final class OrdersOf extends DubboOrdersTriple.OrdersImplBase {
        private final String server;

        OrdersOf(String server) {
            this.server = server;
        }

        @Override
        public Receipt place(Order order) {
            String[] words = order.getItem().split(":");
            switch (words[0]) {
                case "sleep":
                    pause(Long.parseLong(words[1]));
                    break;
                case "fail":
                    throw TriRpcStatus.fromCode(TriRpcStatus.Code.valueOf(words[1]))
                            .withDescription("failed as asked")
                            .asException();
                case "throw":
                    throw new IllegalStateException("thrown as asked");
                case "attachments":
                    RpcContext.getServerContext().setAttachment("served-by", server);
                    return receipt(attachments());
                default:
            }
            return receipt(order.getItem());
        }

        @Override
        public void watch(Order order, StreamObserver<Receipt> responses) {
            for (int number = 1; number <= Integer.parseInt(order.getItem()); number++) {
                responses.onNext(receipt(Integer.toString(number)));
            }
            responses.onCompleted();
        }

        @Override
        public StreamObserver<Order> upload(StreamObserver<Receipt> responses) {
            StringBuilder items = new StringBuilder();
            return new Requests<>(responses) {
                @Override
                public void onNext(Order order) {
                    items.append(order.getItem());
                }

                @Override
                public void onCompleted() {
                    responses.onNext(receipt(items.toString()));
                    responses.onCompleted();
                }
            };
        }

        @Override
        public StreamObserver<Order> chat(StreamObserver<Receipt> responses) {
            return new Requests<>(responses) {
                @Override
                public void onNext(Order order) {
                    responses.onNext(receipt(order.getItem()));
                }

                @Override
                public void onCompleted() {
                    responses.onCompleted();
                }
            };
        }

        private Receipt receipt(String text) {
            return Receipt.newBuilder().setServer(server).setText(text).build();
        }

        private static String attachments() {
            Map<String, Object> sorted = new TreeMap<>(RpcContext.getServerAttachment().getObjectAttachments());
            StringBuilder text = new StringBuilder();
            sorted.forEach((key, value) -> text.append(key).append('=')
                    .append(value instanceof byte[] ? new String((byte[]) value) : value).append('\n'));
            return text.toString();
        }

        private static void pause(long milliseconds) {
            try {
                Thread.sleep(milliseconds);
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    /** Requests of a stream, of which an error ends the responses. */
    private abstract static class Requests<R> implements StreamObserver<Order> {
        private final StreamObserver<R> responses;

        Requests(StreamObserver<R> responses) {
            this.responses = responses;
        }

        @Override
        public void onError(Throwable error) {
            responses.onError(error);
        }
    }
}
