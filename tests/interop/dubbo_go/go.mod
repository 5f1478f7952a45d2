module rpcwheel/tests/interop/dubbo_go

go 1.24.0

require dubbo.apache.org/dubbo-go/v3 v3.3.1
