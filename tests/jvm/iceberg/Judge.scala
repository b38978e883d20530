package ags.judge

import java.io.{BufferedReader, InputStreamReader, PrintStream}

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.databind.node.ObjectNode
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.RawLocalFileSystem
import org.apache.hadoop.hive.conf.HiveConf
import org.apache.hadoop.hive.metastore.HiveMetaStore
import org.apache.hadoop.hive.metastore.txn.TxnDbUtil
import org.apache.hadoop.hive.shims.ShimLoader
import org.apache.iceberg.{CatalogUtil, HasTableOperations, PartitionSpecParser, SchemaParser, Table}
import org.apache.iceberg.catalog.{Catalog, TableIdentifier}
import org.apache.spark.sql.SparkSession

/** Local files without .crc files beside them. Iceberg's readers ask for the scheme, which Hadoop's class does not have. */
class PlainFiles extends RawLocalFileSystem {
  override def getScheme: String = "file"
}

/** Iceberg's Java in Spark, with tables that are encrypted: a request is a line of JSON on standard input, its answer one
  * on standard output. The only argument is JSON: {"conf": {Spark's settings}, "catalog": {properties of the catalog}}.
  */
object Judge {
  private val mapper = new ObjectMapper

  def main(args: Array[String]): Unit = {
    val answers = new PrintStream(System.out, true, "UTF-8")
    System.setOut(System.err) // nothing that is logged may come between the answers
    val judge = new Judge(mapper.readTree(args(0)))
    val requests = new BufferedReader(new InputStreamReader(System.in, "UTF-8"))
    Iterator.continually(requests.readLine()).takeWhile(_ != null).foreach { line =>
      answers.println(answer(judge, mapper.readTree(line)))
    }
    Runtime.getRuntime.halt(0) // a metastore's threads do not end, and nothing here has to be kept
  }

  private def answer(judge: Judge, request: JsonNode): ObjectNode =
    try judge.answer(request)
    catch {
      case error: VirtualMachineError => throw error
      case error: Throwable =>
        if (System.getenv("AGS_JUDGE_TRACE") != null) error.printStackTrace()
        val causes = Iterator.iterate(error)(_.getCause).takeWhile(_ != null).take(10).map(_.toString)
        mapper.createObjectNode().set[ObjectNode]("error", mapper.valueToTree[JsonNode](causes.toSeq.asJava))
    }
}

private class Judge(settings: JsonNode) {
  private val mapper = new ObjectMapper

  private val spark: SparkSession = {
    val builder = SparkSession.builder()
    settings.required("conf").properties.forEach(one => builder.config(one.getKey, one.getValue.asText))
    builder.getOrCreate()
  }

  private val conf: Configuration = spark.sparkContext.hadoopConfiguration

  TxnDbUtil.prepDb(new HiveConf(conf, classOf[Judge])) // the tables of locks, which commits take

  private val catalog: Catalog = {
    val properties = settings.required("catalog").properties.asScala.map(one => one.getKey -> one.getValue.asText).toMap
    CatalogUtil.loadCatalog("org.apache.iceberg.hive.HiveCatalog", "hive", properties.asJava, conf)
  }

  def answer(request: JsonNode): ObjectNode = {
    val answer = mapper.createObjectNode()
    request.required("op").textValue match {
      case "sql" =>
        val found = spark.sql(request.required("text").textValue)
        answer.set[JsonNode]("columns", mapper.valueToTree(found.columns))
        answer.set[JsonNode]("rows", Values.write(found.collect().toSeq.map(_.toSeq)))
      case "create"    => create(request); answer
      case "register"  => register(request); answer
      case "location"  => answer.put("location", operations(table(request)).current.metadataFileLocation)
      case "write"     => new Writer(table(request), request).append(); answer
      case "eq_delete" => new Writer(table(request), request).deleteEqual(); answer
      case "delete"    => Deleter.delete(table(request), request); answer
      case "read"      => answer.set[JsonNode]("rows", Values.write(Reader.rows(table(request), request)))
      case "race"      => answer.put("commits", Racers.commit(table(request), request))
      case "metastore" => answer.put("port", metastore)
    }
    answer
  }

  private def name(request: JsonNode): TableIdentifier = TableIdentifier.parse(request.required("name").textValue)

  private def table(request: JsonNode): Table = catalog.loadTable(name(request))

  private def operations(table: Table) = table.asInstanceOf[HasTableOperations].operations

  private def create(request: JsonNode): Unit = {
    val schema = SchemaParser.fromJson(request.required("schema").toString)
    val builder = catalog.buildTable(name(request), schema)
    Option(request.get("spec")).foreach { spec =>
      builder.withPartitionSpec(PartitionSpecParser.fromJson(schema, spec.toString))
    }
    request.path("properties").properties.forEach(one => builder.withProperty(one.getKey, one.getValue.asText))
    builder.create()
  }

  private def register(request: JsonNode): Unit = {
    if (catalog.tableExists(name(request))) catalog.dropTable(name(request), false)
    catalog.registerTable(name(request), request.required("location").textValue)
  }

  /** A Hive metastore on loopback, over the database that this catalog has: its port. */
  private lazy val metastore: Int = {
    val socket = new java.net.ServerSocket(0)
    val port = socket.getLocalPort
    socket.close()
    val hive = new HiveConf(conf, classOf[Judge])
    val bridge = ShimLoader.getHadoopThriftAuthBridge
    val serve = new Thread(() => HiveMetaStore.startMetaStore(port, bridge, hive))
    serve.setDaemon(true)
    serve.start()
    val deadline = System.nanoTime + 60L * 1000000000L
    def answers = try { new java.net.Socket("127.0.0.1", port).close(); true } catch { case _: java.io.IOException => false }
    while (!answers) {
      if (System.nanoTime > deadline) throw new IllegalStateException("the metastore does not start")
      Thread.sleep(50)
    }
    port
  }
}
