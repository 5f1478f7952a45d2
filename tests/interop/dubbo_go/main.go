// A provider and a consumer of dubbo-go, for rpcwheel's interop tests.
//
//	dubbo_go provider -registry HOST:PORT -level all -name go -port 50051
//	dubbo_go consumer -registry HOST:PORT -level service
//
// The service is shop.v1.Orders of examples/dubbo. There is no generated code: on the wire, an Order
// is a StringValue (one string), and a Receipt an Any (a string and bytes).
//
// The provider ends with SIGTERM. Place answers with the item; the item
// "attachments" with the attachments, "fail" with an error, and "sleep:MS" after that time.
//
// The consumer prints "> ready", and a line for each line that it reads, also with "> ", because
// dubbo-go prints its log too:
//
//	place ITEM               watch COUNT
//	upload ITEM ITEM ...     chat ITEM ITEM ...
//	load SECONDS             calls without a pause; prints which servers answered, and each error
//	attach KEY=VALUE         an attachment of the next call
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"dubbo.apache.org/dubbo-go/v3"
	"dubbo.apache.org/dubbo-go/v3/client"
	"dubbo.apache.org/dubbo-go/v3/common/constant"
	_ "dubbo.apache.org/dubbo-go/v3/imports"
	"dubbo.apache.org/dubbo-go/v3/protocol"
	"dubbo.apache.org/dubbo-go/v3/protocol/triple/triple_protocol"
	"dubbo.apache.org/dubbo-go/v3/registry"
	"dubbo.apache.org/dubbo-go/v3/server"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const service = "shop.v1.Orders"

type (
	order   = wrapperspb.StringValue
	receipt = anypb.Any
)

func main() {
	log.SetOutput(os.Stderr)
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	address := flags.String("registry", "127.0.0.1:2181", "ZooKeeper")
	level := flags.String("level", "", "service, interface or all; dubbo-go's default: service")
	metadata := flags.String("metadata", "", "local or remote; dubbo-go's default: local")
	application := flags.String("application", "go-"+os.Args[1], "")
	name := flags.String("name", "go", "the server's name in its answers")
	port := flags.Int("port", 50051, "of the provider")
	group := flags.String("group", "", "")
	version := flags.String("version", "", "")
	check(flags.Parse(os.Args[2:]))

	registries := []registry.Option{registry.WithZookeeper(), registry.WithAddress(*address)}
	switch *level {
	case "interface":
		registries = append(registries, registry.WithRegisterInterface())
	case "all":
		registries = append(registries, registry.WithRegisterServiceAndInterface())
	}
	options := []dubbo.InstanceOption{
		dubbo.WithName(*application),
		dubbo.WithRegistry(registries...),
	}
	if *metadata == "remote" {
		options = append(options, dubbo.WithRemoteMetadata())
	}
	if os.Args[1] == "provider" {
		triple := dubbo.WithProtocol(protocol.WithTriple(), protocol.WithPort(*port))
		provide(*name, *group, *version, append(options, triple))
	} else {
		consume(*group, *version, options)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Orders is the provider. dubbo-go wants it and its methods exported.
type Orders struct{ name string }

func (o *Orders) receipt(text string) *receipt {
	return &receipt{TypeUrl: o.name, Value: []byte(text)}
}

func (o *Orders) Place(ctx context.Context, request *order) (*receipt, error) {
	item := request.Value
	word, argument, _ := strings.Cut(item, ":")
	switch word {
	case "attachments":
		var lines []string
		attachments, _ := ctx.Value(constant.AttachmentKey).(map[string]any)
		for key, value := range attachments {
			lines = append(lines, fmt.Sprintf("%s=%v", key, value))
		}
		slices.Sort(lines)
		return o.receipt(strings.Join(lines, "\n")), nil
	case "fail":
		return nil, errors.New("failed as asked")
	case "sleep":
		milliseconds, err := strconv.Atoi(argument)
		check(err)
		time.Sleep(time.Duration(milliseconds) * time.Millisecond)
	}
	return o.receipt(item), nil
}

func (o *Orders) Watch(_ context.Context, request *order, stream *triple_protocol.ServerStream) error {
	last, err := strconv.Atoi(request.Value)
	check(err)
	for number := range last {
		if err := stream.Send(o.receipt(strconv.Itoa(number + 1))); err != nil {
			return err
		}
	}
	return nil
}

func (o *Orders) Upload(_ context.Context, stream *triple_protocol.ClientStream) (*receipt, error) {
	var items strings.Builder
	for stream.Receive(new(order)) {
		items.WriteString(stream.Msg().(*order).Value)
	}
	return o.receipt(items.String()), stream.Err()
}

func (o *Orders) Chat(_ context.Context, stream *triple_protocol.BidiStream) error {
	for {
		request := new(order)
		if err := stream.Receive(request); err != nil {
			return nil // the end of the requests
		}
		if err := stream.Send(o.receipt(request.Value)); err != nil {
			return err
		}
	}
}

func provide(name, group, version string, options []dubbo.InstanceOption) {
	newOrder := func() any { return new(order) }
	same := func(stream any) any { return stream }
	info := &server.ServiceInfo{
		InterfaceName: service,
		Methods: []server.MethodInfo{
			{
				Name: "Place", Type: constant.CallUnary, ReqInitFunc: newOrder,
				MethodFunc: func(ctx context.Context, args []any, handler any) (any, error) {
					response, err := handler.(*Orders).Place(ctx, args[0].(*order))
					if err != nil {
						return nil, err
					}
					return triple_protocol.NewResponse(response), nil
				},
			},
			{
				Name: "Watch", Type: constant.CallServerStream, ReqInitFunc: newOrder, StreamInitFunc: same,
				MethodFunc: func(ctx context.Context, args []any, handler any) (any, error) {
					stream := args[1].(*triple_protocol.ServerStream)
					return nil, handler.(*Orders).Watch(ctx, args[0].(*order), stream)
				},
			},
			{
				Name: "Upload", Type: constant.CallClientStream, StreamInitFunc: same,
				MethodFunc: func(ctx context.Context, args []any, handler any) (any, error) {
					response, err := handler.(*Orders).Upload(ctx, args[0].(*triple_protocol.ClientStream))
					if err != nil {
						return nil, err
					}
					return triple_protocol.NewResponse(response), nil
				},
			},
			{
				Name: "Chat", Type: constant.CallBidiStream, StreamInitFunc: same,
				MethodFunc: func(ctx context.Context, args []any, handler any) (any, error) {
					return nil, handler.(*Orders).Chat(ctx, args[0].(*triple_protocol.BidiStream))
				},
			},
		},
	}
	instance, err := dubbo.NewInstance(options...)
	check(err)
	provider, err := instance.NewServer(server.WithServerGroup(group), server.WithServerVersion(version))
	check(err)
	check(provider.Register(&Orders{name}, info))
	check(provider.Serve())
}

// shop is the consumer.
type shop struct{ connection *client.Connection }

func consume(group, version string, options []dubbo.InstanceOption) {
	instance, err := dubbo.NewInstance(options...)
	check(err)
	consumer, err := instance.NewClient(client.WithClientNoCheck())
	check(err)
	methods := []string{"Place", "Watch", "Upload", "Chat"}
	connection, err := consumer.DialWithInfo(
		service, &client.ClientInfo{InterfaceName: service, MethodNames: methods},
		client.WithGroup(group), client.WithVersion(version),
	)
	check(err)
	orders := &shop{connection}
	answer("ready")
	attachments := map[string]any{}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		ctx := context.WithValue(context.Background(), constant.AttachmentKey, attachments)
		result, err := "", error(nil)
		switch words[0] {
		case "attach":
			key, value, _ := strings.Cut(words[1], "=")
			attachments = map[string]any{key: value}
			answer("attached")
			continue
		case "load":
			result, err = orders.load(words[1])
		case "place":
			result, err = orders.place(ctx, words[1])
		case "watch":
			result, err = orders.watch(ctx, words[1])
		case "upload":
			result, err = orders.upload(ctx, words[1:])
		case "chat":
			result, err = orders.chat(ctx, words[1:])
		}
		attachments = map[string]any{}
		if err != nil {
			result = "! " + describe(err)
		}
		answer(result)
	}
}

func answer(line string) { fmt.Println("> " + line) }

func text(response *receipt) string { return response.TypeUrl + ": " + string(response.Value) }

func describe(err error) string {
	return strings.ReplaceAll(fmt.Sprintf("%v %v", triple_protocol.CodeOf(err), err), "\n", " ")
}

func (s *shop) place(ctx context.Context, item string) (string, error) {
	response := new(receipt)
	err := s.connection.CallUnary(ctx, []any{&order{Value: item}}, response, "Place")
	return text(response), err
}

func (s *shop) watch(ctx context.Context, count string) (string, error) {
	opened, err := s.connection.CallServerStream(ctx, &order{Value: count}, "Watch")
	if err != nil {
		return "", err
	}
	stream := opened.(*triple_protocol.ServerStreamForClient)
	defer stream.Close()
	var texts []string
	for stream.Receive(new(receipt)) {
		texts = append(texts, text(stream.Msg().(*receipt)))
	}
	return strings.Join(texts, "; "), stream.Err()
}

func (s *shop) upload(ctx context.Context, items []string) (string, error) {
	opened, err := s.connection.CallClientStream(ctx, "Upload")
	if err != nil {
		return "", err
	}
	stream := opened.(*triple_protocol.ClientStreamForClient)
	for _, item := range items {
		if err := stream.Send(&order{Value: item}); err != nil {
			return "", err
		}
	}
	response := new(receipt)
	err = stream.CloseAndReceive(triple_protocol.NewResponse(response))
	return text(response), err
}

func (s *shop) chat(ctx context.Context, items []string) (string, error) {
	opened, err := s.connection.CallBidiStream(ctx, "Chat")
	if err != nil {
		return "", err
	}
	stream := opened.(*triple_protocol.BidiStreamForClient)
	var texts []string
	for _, item := range items {
		if err := stream.Send(&order{Value: item}); err != nil {
			return "", err
		}
		response := new(receipt)
		if err := stream.Receive(response); err != nil {
			return "", err
		}
		texts = append(texts, text(response))
	}
	return strings.Join(texts, "; "), errors.Join(stream.CloseRequest(), stream.CloseResponse())
}

func (s *shop) load(seconds string) (string, error) {
	limit, err := strconv.ParseFloat(seconds, 64)
	check(err)
	counts := map[string]int{}
	for end := time.Now().Add(time.Duration(limit * float64(time.Second))); time.Now().Before(end); {
		answer, err := s.place(context.Background(), "load")
		if err != nil {
			answer = "! " + describe(err)
		}
		counts[strings.TrimSuffix(answer, ": load")]++
	}
	return fmt.Sprint(counts), nil
}
