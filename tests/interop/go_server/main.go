// A gRPC server that is no Python, for rpcwheel's interop tests.
//
// /test.Shop/{UnaryUnary,UnaryStream,StreamUnary,StreamStream}, bytes in and bytes out. What a call
// does stands in its request metadata:
//
//	x-key     names the call; all its attempts carry the same
//	x-script  one word for each attempt, the first word for the first; then echo
//
// Words: a status code (UNAVAILABLE, or UNAVAILABLE/100 with 100 as grpc-retry-pushback-ms), hang,
// silent (after one message of a response stream), reset (the stream is read to its end, then fails
// with UNAVAILABLE).
//
// Echo is the requests joined (unary answers), one message per byte (UnaryStream), each message
// (StreamStream). Initial and trailing metadata say what the server saw: x-attempt,
// x-previous-attempts, x-deadline-ms.
//
// /test.Shop/Report with a key as the request answers with JSON: all attempts of that call.
//
// The port is printed when the server is ready; it ends with its stdin.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// bytesCodec leaves messages as they are on the wire.
type bytesCodec struct{}

func (bytesCodec) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (bytesCodec) Unmarshal(wire []byte, message any) error {
	*message.(*[]byte) = bytes.Clone(wire)
	return nil
}

func (bytesCodec) Name() string { return "proto" }

var _ encoding.Codec = bytesCodec{}

// attempt is what the server saw of one; tests read it as JSON.
type attempt struct {
	Method           string   `json:"method"`
	Requests         []string `json:"requests"`
	DeadlineMs       *int64   `json:"deadline_ms"`
	PreviousAttempts string   `json:"previous_attempts"`
	Ended            string   `json:"ended"`
	At               int64    `json:"at_ms"`
}

type shop struct {
	mutex sync.Mutex
	calls map[string][]*attempt
}

func (s *shop) begin(key string, seen *attempt) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.calls[key] = append(s.calls[key], seen)
	return len(s.calls[key])
}

func (s *shop) note(change func()) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	change()
}

func (s *shop) report(key string) ([]byte, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return json.Marshal(s.calls[key])
}

func (s *shop) serve(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	if method == "/test.Shop/Report" {
		var key []byte
		if err := stream.RecvMsg(&key); err != nil {
			return err
		}
		answer, err := s.report(string(key))
		if err != nil {
			return err
		}
		return stream.SendMsg(&answer)
	}
	seen := &attempt{
		Method:           method,
		Requests:         []string{},
		PreviousAttempts: first(stream, "grpc-previous-rpc-attempts"),
		At:               time.Now().UnixMilli(),
	}
	if deadline, ok := stream.Context().Deadline(); ok {
		left := time.Until(deadline).Milliseconds()
		seen.DeadlineMs = &left
	}
	number := s.begin(first(stream, "x-key"), seen)
	err := s.act(stream, seen, number)
	s.note(func() { seen.Ended = nameOf(err) })
	return err
}

// nameOf gives the status code that an error goes out with.
func nameOf(err error) string {
	if known, ok := status.FromError(err); ok {
		return known.Code().String()
	}
	return status.FromContextError(err).Code().String()
}

// act does what the script says for this attempt.
func (s *shop) act(stream grpc.ServerStream, seen *attempt, number int) error {
	trailer := metadata.Pairs("x-attempt", strconv.Itoa(number), "x-previous-attempts", seen.PreviousAttempts)
	if seen.DeadlineMs != nil {
		trailer.Set("x-deadline-ms", strconv.FormatInt(*seen.DeadlineMs, 10))
	}
	stream.SetTrailer(trailer)
	word := ""
	if script := strings.Fields(first(stream, "x-script")); number <= len(script) {
		word = script[number-1]
	}
	name, pushback, asked := strings.Cut(word, "/")
	if asked {
		stream.SetTrailer(metadata.Pairs("grpc-retry-pushback-ms", pushback))
	}
	switch name {
	case "":
		stream.SetHeader(trailer)
		return s.echo(stream, seen, -1)
	case "hang":
		<-stream.Context().Done()
		return stream.Context().Err()
	case "silent":
		if err := s.echo(stream, seen, 1); err != nil {
			return err
		}
		<-stream.Context().Done()
		return stream.Context().Err()
	case "reset":
		if _, err := s.readAll(stream, seen); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "read all, then gave up")
	}
	var code codes.Code
	if err := code.UnmarshalJSON([]byte(`"` + name + `"`)); err != nil {
		return status.Errorf(codes.InvalidArgument, "no such word in x-script: %q", word)
	}
	return status.Errorf(code, "scripted for attempt %d", number)
}

// echo answers with what came in, at most `limit` messages of a stream; a negative limit is none.
func (s *shop) echo(stream grpc.ServerStream, seen *attempt, limit int) error {
	switch seen.Method {
	case "/test.Shop/UnaryStream":
		request, err := s.read(stream, seen)
		if err != nil {
			return err
		}
		for number, letter := range request {
			if number == limit {
				return nil
			}
			if err := stream.SendMsg(&[]byte{letter}); err != nil {
				return err
			}
		}
		return nil
	case "/test.Shop/StreamStream":
		for number := 0; number != limit; number++ {
			request, err := s.read(stream, seen)
			if err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := stream.SendMsg(&request); err != nil {
				return err
			}
		}
		return nil
	case "/test.Shop/UnaryUnary", "/test.Shop/StreamUnary":
		requests, err := s.readAll(stream, seen)
		if err != nil {
			return err
		}
		answer := bytes.Join(requests, nil)
		return stream.SendMsg(&answer)
	}
	return status.Errorf(codes.Unimplemented, "no method %s", seen.Method)
}

func (s *shop) readAll(stream grpc.ServerStream, seen *attempt) ([][]byte, error) {
	var requests [][]byte
	for {
		request, err := s.read(stream, seen)
		if err == io.EOF {
			return requests, nil
		} else if err != nil {
			return nil, err
		}
		requests = append(requests, request)
	}
}

func (s *shop) read(stream grpc.ServerStream, seen *attempt) ([]byte, error) {
	var request []byte
	if err := stream.RecvMsg(&request); err != nil {
		return nil, err
	}
	s.note(func() { seen.Requests = append(seen.Requests, string(request)) })
	return request, nil
}

func first(stream grpc.ServerStream, key string) string {
	values := metadata.ValueFromIncomingContext(stream.Context(), key)
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	shop := &shop{calls: map[string][]*attempt{}}
	server := grpc.NewServer(
		grpc.ForceServerCodec(bytesCodec{}), grpc.UnknownServiceHandler(shop.serve),
	)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		server.Stop()
	}()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
